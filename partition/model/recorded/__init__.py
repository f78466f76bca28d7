"""Cut units that are the user's own modules: one forward recorded on fake tensors, run in stages as plain Python.

which      modules that are units, and modules that are opened
intercept  calls of modules, of torch's functions, of autograd functions and of checkpointing, reported to a listener
reads      what the code between units reads and writes while it is recorded
refusals   what cannot be recorded; flags of tensors of which one value alone raises no error
guards     of a record: whether what it has read is unchanged
templates  arguments with references in the places of tensors
calls      a record: calls of units, and of torch's functions between them; what follows from what
values     of a forward that is being recorded, by number, who made which tensor, and the numbers of random calls
words      a record in words and an order that are the same in every process
recorder   listens, and makes one
recording  the forward it listens to, on fake tensors, and its errors with the user's line
flow       what needs what in it, where a cut may be, and the stages of another record
program    a stage of it, compiled to Python
"""
