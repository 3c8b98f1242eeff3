"""What the named integers of the rendered sources mean: the comment behind each of them."""

MEANINGS = {
    "THREADS": "threads in a block",
    "WARPS": "warps in a block",
    "LANES": "neighbouring lanes that share a row",
    "ROWS": "rows a warp, or a group of lanes, takes at once",
    "VECTOR": "neighbouring columns in one access",
    "CHUNK_VECTORS": "vectors of a row that a lane holds at once",
    "CHUNKS": "pieces a row is taken in",
    "IDENTITY": "1: dgamma and dbeta from G and db; 0: as sums of dn over the rows",
    "COLUMN_THREADS": "neighbouring columns a block owns at once",
    "COLUMN_GROUPS": "groups of threads that share out the rows of w",
    "COLUMN_OUTS": "rows of w a thread owns at once",
    "CHAIN": "rows summed in one float32 chain",
    "OUT_CHAIN": "products over OUT in one float32 chain",
    "ROW_CHAIN": "values of a row summed in one float32 chain",
    "TILE_O": "rows of a thread's tile of G",
    "TILE_H": "columns of a thread's tile of G",
    "O_PITCH": "floats from one row of dy to the next in shared memory",
    "H_PITCH": "floats from one row of x or w to the next in shared memory",
    "SUM_WARPS": "warps that share out the splits",
    "SUM_VECTOR": "columns a lane sums",
}
