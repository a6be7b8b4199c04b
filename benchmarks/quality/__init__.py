"""What ports are worth: a matrix of tasks, methods and seeds, its figures, and the documents made from them."""
