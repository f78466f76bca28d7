"""Nodes on one host: each a set of Linux namespaces with its own address, and shaped links between them.

    node 0                 node 1                             node 0              node 1
    eth0 (tbf)             eth0 (tbf)                         eth0, a TUN (tbf)   eth0, a TUN (tbf)
      |                      |                                  |                   |
     veth -- bridge (tbf) -- veth       or, with latency:       +---- wire.py ------+   reads each packet, holds it
             its own namespace                                                         as long as it travels, writes it

Nothing has a name on the host: processes hold the namespaces, which end with the process that made them, even if it is
killed. No address is visible outside, so that simultaneous runs don't interfere.
"""
