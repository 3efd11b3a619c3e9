"""Global Parameter Storage (paper §5.1): whoever needs parameters Reads them here, training Writes them.

owns      the host pool of this node (shared memory): the whole models, or this node's shard of them; the
          readable version of each model, leases, transfer plans
consumes  the models' Hugging Face folders at start; Read and Write over HTTP; among several nodes the
          heartbeats, the view and the commit records of the others, and their bytes by NIXL
produces  `policy.version` (KV) at start and at every committed Write
"""
