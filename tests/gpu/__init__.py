"""What only a GPU can show; ``python -m tests.gpu`` on a machine that has one, in a few minutes.

The suite has no GPU: it runs programs on CPUs, and NCCL's rules as a mode of ranks that are
threads. Here all ranks share one GPU, as threads with the text for NCCL, or as gloo processes.
"""
