"""Running a ladder. run.py: start to end; ledger.py: starts what measures and trains; plan.py: variants and design;
trainings.py: which trainings, until when; folder.py, processes.py; collect.py: the record."""
