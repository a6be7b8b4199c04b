"""Fine-tuning: the training loop with its checkpoints, and the recorder of trajectories."""
