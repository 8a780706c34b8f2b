"""The paper's experiments and ours as lists of runs, and their reports.

`catalogue.py` lists the experiments and their scales, `plan.py` turns one into runs, `runner.py` has each done in a
process of its own, `results.py` reads what they left, and `report.py` writes it beside the paper's numbers.
"""
