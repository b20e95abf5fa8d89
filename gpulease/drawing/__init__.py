"""What a person reads of jobs and GPUs: words, bars, arrays and axes, for terminal and page."""
