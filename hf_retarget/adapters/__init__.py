"""PEFT adapters: read as tuned models (`reading.py`), and written as the result of a port (`writing.py`)."""
