"""What a run leaves in its folder, and the comparison of runs: metrics, record, loss curve, trackers, table."""
