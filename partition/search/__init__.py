"""The planner: sizes, schedule, chunks, microbatch, recomputation, sharding and cuts, ranked by simulation.

arguments  what is asked, checked
space      which configurations there are
search     which of them to look at next, and when none left can win
cuts       where to cut one of them, or cuts of their own with unequal replicas
evaluate   what it costs and holds on its ranks, and its step; the least step by `bounds`
simulated  its schedule, batches of it, and what is in flight
result     the Plan
given      likewise of a plan that is given
"""
