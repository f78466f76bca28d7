"""Cut units that are the user's own modules: one forward recorded on fake tensors, run in stages as plain Python.

which      modules that are units, and modules that are opened
intercept  calls of modules, of torch's functions, of autograd functions and of checkpointing, seen while a model runs
attributes who writes and reads what lies in objects and modules
reads      what the code between units reads while it is recorded
walk       over all that it has read: what is compared before each batch
guards     of a record: whether what it has read is as it was
templates  arguments with references in the places of tensors
calls      a record: calls of units, and of torch's functions between them
decisions  on numbers that are drawn between units
values     of a forward that is being recorded, by number
owners     who made which tensor, and what units work on that nobody passed to them
draws      under which number each call is seeded
carried    what a forward leaves behind in attributes and buffers
recorder   listens, and makes one
recording  the forward it listens to, on fake tensors, and its errors with the user's line
flow       what needs what in it, and where a cut may stand
program    a stage of it, compiled to Python
"""
