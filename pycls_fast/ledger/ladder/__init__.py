"""Running a ladder, in reading order: plan (its variants), folder, processes, work, accuracy, run (start to end)."""
