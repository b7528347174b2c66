"""glibc's allocator: memory that a step gives back is kept for the next step.

By default glibc gives whole heaps of a thread back to the system as soon as they are
free, and TensorFlow's threads free nearly all of theirs in every step. Where that
happens, a step of ResNet50 has 60,000 page faults and takes 1.5 times as long.
"""

SETTINGS = {
    "MALLOC_TOP_PAD_": str(128 * 2**20),  # more than a heap has: none is given back
    "MALLOC_TRIM_THRESHOLD_": str(2**40),  # nor is the end of one
}
"""Environment variables, read when a process starts; other allocators ignore them."""
