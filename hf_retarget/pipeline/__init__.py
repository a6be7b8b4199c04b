"""From references to results: what the commands do, each as one function that reads like the sentence about it."""
