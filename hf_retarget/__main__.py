"""``python -m hf_retarget``: the same as ``hf-retarget``, for torchrun and for those who choose their Python."""

from hf_retarget.cli import main

if __name__ == "__main__":
    main(prog_name="hf-retarget")
