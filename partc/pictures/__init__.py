"""Pictures of a program as SVG, and of several programs beside each other.

In: a program, its plan or cost; several programs. Out: the text of an SVG, or of HTML for a
notebook. Start: `picture.py`; `comparison.py` finds the numbers of several programs and machines,
`compare_svg.py` draws them. Never: a page with a script, which is `partc/reports`.
"""
