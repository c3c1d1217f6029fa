"""The ledger: what each choice costs in time, memory and accuracy.

Reading order: `ladder/run.py` (what is measured, in which order), `ladder/ledger.py` (starts the processes that measure
and train), `measure/` (each measurement, in a process of its own), `report/record.py` (the record), `report/effects.py`
(what it may claim), `report/page.py`. `compare.py` puts two runs side by side, `runs.py` lists many.
"""
