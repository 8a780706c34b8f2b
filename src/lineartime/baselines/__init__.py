"""The systems that GAU and FLASH are compared with, and the variants of both: one mechanism, one file."""
