"""Figures of this machine beside their yardsticks: what `enginehouse bench` runs. Nothing of a plane is touched."""
