"""Groups that survive a killed run: the journal, its recovery, and their form on disk."""
