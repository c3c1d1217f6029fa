"""Running a ladder, in reading order: plan (its variants), folder, processes, work, record, run (from start to end)."""
