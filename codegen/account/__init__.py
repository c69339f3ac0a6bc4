"""What a program will hold in memory, counted on scheduled graphs before any text is printed.

The account goes through the calls as the program will make them: methods of blocks, their
arguments, gathered weights, buckets of gradients, and where a ``del`` will stand.
"""
