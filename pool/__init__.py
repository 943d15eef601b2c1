"""The pool: model weights in shared host memory, one daemon a node; engines map them. Imports no other package of ours."""
