"""Fine-tuning: its options, its loop, its checkpoints, and a recorder of the way it took."""
