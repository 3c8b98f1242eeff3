"""What was tried elsewhere: by an earlier run, which this one takes up, or by other processes, which share one study."""
