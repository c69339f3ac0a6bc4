"""Time to a fixed loss for ways to train that send less, on links of limited bandwidth."""
