"""What requests to the engines share: slots, waiting, ending."""
