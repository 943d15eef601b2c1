"""The node worker: follows events, compares what should be with what is, acts, reports."""

from controlplane import lean

lean.install()
