"""Nodes on one host: each a set of Linux namespaces with an address of its own, and shaped links between them.

    node 0                 node 1                             node 0              node 1
    eth0 (tbf)             eth0 (tbf)                         eth0, a TUN (tbf)   eth0, a TUN (tbf)
      |                      |                                  |                   |
     veth -- bridge (tbf) -- veth       or, with latency:       +---- wire.py ------+   reads each packet, holds it
             its own namespace                                                         as long as it travels, writes it

Nothing here has a name on the host: namespaces are held by processes, and end with the process that asked for them,
even if that is killed. No address is seen outside, so that runs beside each other cannot meet.
"""
