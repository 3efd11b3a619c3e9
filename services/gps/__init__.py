"""Global Parameter Storage of a node (paper §5.1): whoever needs parameters Reads them here, training Writes
them.

owns      the host pool of this node (shared memory), the readable version of each model, leases, transfer
plans consumes  the models' Hugging Face folders at start; Read and Write over HTTP
produces  `policy.version` (KV) at start and at every committed Write
"""
