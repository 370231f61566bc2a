"""What every connection over ZMQ has in common, whichever room it belongs to.

`notation` says how keys and endpoints are written, `curve` puts keys onto sockets, `dialling` makes connections anew,
`dead_peers` ends those whose other end is gone. Knows libzmq; must never know a message, a setting or another room.
"""
