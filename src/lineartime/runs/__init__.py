"""What a run leaves, and how runs are compared: metrics, record, loss curve, trackers, table."""
