"""Which of a traced graph's numbers can each rank hold a part of? Roles over a tensor axis, from the graph alone.

`ops` says what each operation may be done on parts of (`rules`, `contracting`, `reshaping`); `seeds` are where a split
can begin, `roles` carries it through the graph, `adapt` and `shards` make modules and parameters fit, `report` tells
what stays whole and why.
"""
