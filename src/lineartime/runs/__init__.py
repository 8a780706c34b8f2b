"""The files in a run's folder, and the comparison of runs: metrics, record, loss curve, trackers, table."""
