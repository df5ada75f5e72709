"""The vocabulary of a schedule: the functions that its FX nodes call.

The nodes show all of a schedule's synchronisation: the values that a node takes (read after write),
the order of its stream, and `after=` (write after read, free after use, and tokens of earlier
graphs: `megacompile.ir.edges`). The
runtime turns each such edge that crosses streams into an event record and a wait; the same edges
are what `megacompile.verify` proves. The functions here only name the ops and declare their effects
(`megacompile.ir.ops.op`); `megacompile.runtime.ops.executor` implements them.

    op             stream   label             takes -> returns
    begin          compute  BEGIN             () -> a point after everything that was queued before
    prefetch       h2d      3PREFETCH@1       bucket, slot -> weights
    reuse          compute  3REUSE@1          bucket, slot -> weights that the forward left there
    resident       compute  3RESIDENT         bucket -> weights that stay on the device
    save_rng       compute  3RNG              stage -> the generators' state
    snapshot       compute  SNAPSHOT          tensor -> copy, made before the tensor is changed
    forward        compute  3F                stage, weights, args -> outputs, new values, saved
    assign         compute  ASSIGN            tensor, new value -> the tensor, changed in place
    recompute      compute  3RECOMPUTE        stage, weights, args, rng -> saved
    rerun          compute  3RERUN            stage, weights, args, rng -> outputs
    backward       compute  3B                stage, weights, args, saved, ... -> gradients
    offload_saved  d2h      3OFFLOAD_SAVED    stage, value -> its copy on the host
    write_saved    write    3WRITE_SAVED      stage, copy on the host -> its copy on a disk
    read_saved     read     3READ_SAVED       stage, copy on a disk -> a copy on the host
    alloc_saved    compute  3ALLOC_SAVED      stage, copy on the host -> a buffer for the value
    fetch_saved    h2d      3FETCH_SAVED      stage, copy on the host, buffer -> the value again
    alloc_grad     compute  3ALLOC_GRAD       bucket -> a buffer for its gradients
    fetch_grad     h2d      3FETCH_GRAD       bucket, buffer -> gradients so far
    add_grad       compute  3ADD_GRAD         bucket, gradients so far, gradients -> their sum
    norm_grad      compute  3NORM_GRAD        bucket, gradients -> their norms and largest values
    keep_grad      compute  3KEEP_GRAD        bucket, gradients -> done; it lives on the device
    offload_grad   d2h      3OFFLOAD_GRAD     bucket, gradients, norms -> done
    alloc_state    compute  3ALLOC_STATE      bucket -> a buffer for its optimizer states
    fetch_state    h2d      3FETCH_STATE      bucket, buffer -> states
    update         compute  3UPDATE           bucket, weights, gradients, states -> all, new
    offload_state  d2h      3OFFLOAD_STATE    bucket, new parameters and states -> done
    update_host    host     3UPDATE           bucket -> done; in host memory
    update_resident compute 3UPDATE           bucket -> done; of a bucket that lives on the device
    read_state     read     3READ_STATE       bucket -> done; its states are in host memory
    write_state    write    3WRITE_STATE      bucket -> done; its states are on the disk
    read_weights   read     3READ_WEIGHTS     bucket -> done; its prefetch may copy from host memory
    read_trained   read     3READ_TRAINED     bucket -> done; an update on the host may change them
    write_weights  write    3WRITE_WEIGHTS    bucket -> done; its new parameters are on the disk
    update_in_place compute 3UPDATE           bucket, gradients, norms -> done; in the backward
    prefetch_shard h2d      3PREFETCH_SHARD@1 bucket, slot -> this rank's part of the weights
    all_gather     comm     3ALL_GATHER@1     bucket, slot, this rank's part -> weights
    alloc_shard    compute  3ALLOC_SHARD      bucket -> a buffer for this rank's gradients
    reduce_scatter comm     3REDUCE_SCATTER   bucket, gradients, buffer -> their mean over ranks
    all_reduce     comm     3ALL_REDUCE       bucket, gradients -> their mean over replicas
    help_host      device   HELP_HOST         updates -> nothing; the device makes some of them
    defer_free     compute  DEFER_FREE        value, after -> nothing; held until `after` is done
    drain          compute  DRAIN             () -> nothing; earlier deferred memory is freed
    free           compute  -                 value, after -> nothing; printed as `del`
"""

from megacompile.ir.ops.bucket_ops import *
from megacompile.ir.ops.nodes import *
from megacompile.ir.ops.op import *
from megacompile.ir.ops.stage_ops import *
