"""`lrmoe doctor`: what is installed, which fast paths are usable and why not, and whether a layer computes right."""

from lrmoe.doctor.command import doctor

__all__ = ["doctor"]
