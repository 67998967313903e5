"""Changes between two versions of a checkpoint: encoded per tensor, described by a manifest. No torch."""
