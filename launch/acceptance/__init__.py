"""One command on an accelerator that says whether shardfuse works there, and how fast."""
