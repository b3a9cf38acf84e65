"""Prints the functions in the list of mutation.c, one a line: what the linker has to redirect."""
import re
import sys

text = open(sys.argv[1]).read()
print("\n".join(re.findall(r"^\t[VR]\((\w+),", text, re.M)))
