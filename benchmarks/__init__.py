"""What the project makes claims about, measured; each figure beside one from the same run."""
