#!/bin/bash
# hosts.sh HOSTFILE PROGRAM [ARGUMENT ...]: trains on the hosts of a file of lines as "a slots=4", which this one reaches by ssh without
# a password. A host that does not answer is left out of the next start. SMP_INTERFACE names the network between them.
set -euo pipefail
hosts=$(awk '$1 !~ /^#/ && NF { if (!($1 in slots)) names[++n] = $1; slots[$1] += ($2 ~ /^slots=/) ? substr($2, 7) : 1 }
  END { for (i = 1; i <= n; ++i) print names[i] ":" slots[names[i]] }' "$1" | paste -sd,)
ranks=$(tr ',' '\n' <<< "$hosts" | awk -F: '{ sum += $2 } END { print sum }')
shift
exec smp run -np "$ranks" --hosts "$hosts" ${SMP_INTERFACE:+--interface "$SMP_INTERFACE"} --max-restarts 5 --min-np 1 "$@"
