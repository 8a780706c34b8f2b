"""The paper's experiments and ours as lists of runs, and their reports.

`catalogue.py` lists the experiments and their scales, `plan.py` turns one into models and options, `runner.py` does each run in
a process of its own and reads its results, and `report.py` writes them beside the paper's numbers.
"""
