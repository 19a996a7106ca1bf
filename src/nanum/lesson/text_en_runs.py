"""The words of parts D and E in English, which run PyTorch on several processes. `text_ko_runs` has the same keys."""

TEXT: dict[str, str] = {
    # Part D
    "D.title": "D. Data parallelism, run for real",
    "D.progress": "steps of every variant in turn",
    "D.intro": (
        "Measured on {device}, torch {torch}, exchanging by {backend}: a decoder of {layers} layers, hidden size "
        "{hidden}, {parameters} parameters in {precision}. A step trains {sequences} sequences of {seq} tokens with "
        "AdamW, whatever the number N of processes, one thread each, among which PyTorch's DistributedDataParallel "
        "divides the sequences."
    ),
    "D.turns": (
        "Everything timed below is kept ready at once and takes one step in turn, {rounds} rounds of it: what the "
        "machine does meanwhile, it does to all alike. A difference counts where {need} rounds or more agree on it, "
        "which chance does less than once in twenty times. The middle half of the samples spreads over up to {spread} "
        "of their median."
    ),
    "D.turns_few": (
        "Everything timed below is kept ready at once and takes one step in turn: what the machine does meanwhile, it "
        "does to all alike. There was time for {rounds} rounds only, too few to tell a difference from chance, so that "
        "none is claimed below; the middle half of the samples spreads over up to {spread} of their median. Close "
        "other programs and run D again."
    ),
    "D.cores": "With {cores} cores, more than {n} processes would share cores, which is no longer dividing.",
    "D.cores_left": "Of {cores} cores, {n} are used at most.",
    "D.cores_one": "There is one core here, which two processes share: what follows is sharing, not dividing.",
    "D.formula": (
        "The formula first. Each of N processes computes its 1/N of the sequences, updates all of the parameters, and "
        "takes part in an all-reduce of their gradients: t(N) = forward and backward of 1/N + optimizer + as much of "
        "the exchange as no computation hides. The gradients are 4 bytes × {parameters} = {grads} MB; in a ring each "
        "process sends 2(N − 1)/N times that, {wire} MB for N = {n}."
    ),
    "D.apart": (
        "The terms, timed one by one: {one} for all of the sequences in one process; {share} for 1/{n} of them "
        "({forward} forward, {backward} backward, {optimizer} optimizer); {reduce} for the all-reduce alone. So t({n}) "
        "should be {low} if the backward pass hides as much of the exchange as it can, and {high} if it hides none. "
        "With the speedup S = t(1)/t(N), the serial fraction s = (1/S − 1/N) / (1 − 1/N) (Karp and Flatt) should be "
        "between {serial_low} and {serial_high}."
    ),
    "D.run": "The run, with PyTorch's own buckets (in the last column, where the rounds leave s):",
    "D.speedup": "Speedup",
    "D.likely": "s between",
    "D.crowded": (
        "Other programs had the cores as well: in the forward pass, which waits for nobody, a process among {n} was "
        "running {running} of the time (by itself {one}). That is in s too. Close other programs, and s is smaller."
    ),
    "D.difference_held": "The difference: none. {measured} is within the formula's {range}.",
    "D.difference_slower": (
        "The difference: {measured} is {percent} over the formula's {range}, and above it in {agree} of {rounds} "
        "rounds. The formula's terms were timed one at a time; {n} processes at once compete for memory and caches, "
        "and for the cores with the threads that carry their messages and with other programs."
    ),
    "D.difference_faster": (
        "The difference: {measured} is {percent} under the formula's {range}, and below it in {agree} of {rounds} "
        "rounds. What was timed alone took longer than the same work within a step."
    ),
    "D.difference_noise": (
        "The difference: {measured} is {percent} outside the formula's {range}, and so it was in {agree} of {rounds} "
        "rounds: not enough to call it more than noise."
    ),
    "D.parts": (
        "s = {serial} is the sum of three: {optimizer} for the optimizer, which every process runs in full; {pieces} "
        "for what forward and backward of a share take beyond an even part; {exchange} for the exchange, and for what "
        "processes at work together take from one another."
    ),
    "D.law_noisy": (
        "The rounds leave s anywhere in {range}, which is wide: what follows is what the medians say, and other rounds "
        "would say otherwise."
    ),
    "D.law": "Amdahl's law, continued with s = {serial} ({range}); speedup by number of processes:",
    "D.ceiling": (
        "No number of them passes 1/s = {limit}, and 1 + 1/s = {half} of them work at half efficiency. The law holds s "
        "fixed. Where exchange and competition grow with N, its curve is a ceiling and not a forecast."
    ),
    "D.no_speedup": (
        "With s = {serial} ({range}) there is nothing for Amdahl's law to continue: {n} processes were no faster than "
        "one. What dividing saves, exchange and competition cost again."
    ),
    "D.no_serial": (
        "With s = {serial} ({range}) Amdahl's law has no ceiling: {n} processes were {speedup} times as fast as one. "
        "Either the smaller share fits the caches better, or this is noise."
    ),
    "D.exchanges": (
        "Three techniques are meant to lower s, here with N = {n}. Bucketing sends the gradients of several tensors as "
        "one message; overlap sends them while the backward pass still computes; an exchange in bf16 halves their "
        "bytes. By the formula one message at the end hides nothing, messages on the way hide up to the backward "
        "pass's time, and bf16 halves what is to be hidden:"
    ),
    "D.exchange": "Exchange",
    "D.by_formula": "Formula",
    "D.as_measured": "Measured",
    "D.off": "Off",
    "D.each_tensor": "each tensor",
    "D.at_once": "one at the end",
    "D.buckets": "buckets",
    "D.bf16": "buckets, bf16",
    "D.effect.bucketing": "Bucketing (from {calls_before} messages to {calls_after})",
    "D.effect.overlap": "Overlap (from one message at the end to buckets on the way)",
    "D.effect.bf16": "Exchange in bf16 (from {sent_before} to {sent_after} MB sent)",
    "D.told_faster": (
        "{effect}: the step is {percent} shorter, in {agree} of {rounds} rounds. s falls from {before} to {after}."
    ),
    "D.told_slower": (
        "{effect}: the step is {percent} longer, in {agree} of {rounds} rounds. s rises from {before} to {after}."
    ),
    "D.told_noise": (
        "{effect}: no difference that can be told from noise. The medians are {percent} apart; the second was faster "
        "in {faster} of {rounds} rounds."
    ),
    "D.on_a_cpu": (
        "This is a CPU's answer. Its messages are carried by threads on the cores that compute, so that an exchange "
        "which is hidden still takes time from the computation it hides behind, and casting to bf16 is work too. "
        "Between GPUs a network card carries them, and computation is so fast that the exchange is longer beside it: "
        "there hiding or halving it is worth more."
    ),
    # Part E
    "E.title": "E. The three ways, run for real",
    "E.progress": "training by each way",
    "E.intro": (
        "Now count what PyTorch exchanges and holds. On {ranks} ranks (torch {torch}, {backend}) each way trains the "
        "same step: {sequences} sequences of {seq} tokens, a decoder of {layers} layers, hidden size {hidden}, "
        "{vocab} tokens in the vocabulary, {parameters} parameters in {precision}. Exchanges are counted where PyTorch "
        "hands them to {backend}, memory at each allocation, and what came in by the kernel at the sockets. First the "
        "formulas, for what a rank sends in a step:"
    ),
    "E.formula.data_parallel": (
        "Data parallel (DDP). Each rank ends its backward pass with a gradient for every parameter, {parameters} × 4 "
        "bytes = {payload}, of its own sequences only. The ring of an all-reduce adds them up and hands the sums "
        "round: (N − 1)/N of the bytes, twice. For N = {n}: 2(N − 1)/N · {payload} = {bytes} bytes."
    ),
    "E.formula.tensor_parallel": (
        "Tensor parallel. In each layer attention and feed-forward each end with a sum over the ranks, and in the "
        "backward pass the gradient of each one's input is such a sum again: 4 all-reduces a layer, {exchanges} in "
        "{layers} layers, of sequences × tokens × hidden size × 4 bytes = {payload}. For N = {n}: 2(N − 1)/N · "
        "{exchanges} · {payload} = {bytes} bytes."
    ),
    "E.formula.pipeline": (
        "Pipeline (1F1B). The first rank sends on the output of its last layer for each of {exchanges} micro-batches, "
        "{payload} bytes each, and the second sends back their gradients: {exchanges} · {payload} = {bytes} bytes "
        "from either."
    ),
    "E.run": "The run. Predicted is what nanum reads off its ledger, counted what PyTorch did; bytes sent by one rank:",
    "E.formula": "Formula",
    "E.predicted": "Predicted",
    "E.counted": "Counted",
    "E.difference": "Difference",
    "E.equal": (
        "The difference of predicted and counted is 0 in every row: kind, axis, phase, dtype, group, number and bytes "
        "of {calls} exchanges on all ranks."
    ),
    "E.differs": ("Predicted and counted differ: {ways}."),
    "E.rows_of_way": "{way} in {rows} rows",
    "E.beyond": "The formulas are not all of it. {said}",
    "E.beyond.data_parallel": (
        "DDP also sends the model's tables of positions from the first rank to the others before each forward pass "
        "({bytes} bytes)."
    ),
    "E.beyond.tensor_parallel": (
        "Tensor parallelism also adds up the embedding's output and the gradient of the head's input, and gathers the "
        "logits over the vocabulary ({bytes} bytes)."
    ),
    "E.beyond.pipeline": "The pipeline sends {bytes} bytes beyond its formula.",
    "E.sockets": (
        "Through the sockets of all ranks came a little more, the headers of messages, than is predicted of the "
        "algorithms that gloo uses: {said}."
    ),
    "E.sockets_of_way": "{way} {counted} bytes ({predicted} predicted)",
    "E.no_sockets": "This system does not tell what came in at a socket: that is not checked here.",
    "E.way": "Way",
    "E.held": (
        "Held by each rank, as counted, in MB (saved is what one forward pass keeps for its backward pass; in a "
        "pipeline several overlap, and only their peak is read). The last column compares with the prediction:"
    ),
    "E.rank": "Rank",
    "E.one_process": "one process",
    "E.params": "Params",
    "E.grads": "Grads",
    "E.optimizer_states": "Optimizer",
    "E.saved": "Saved",
    "E.peak": "Peak",
    "E.agrees": "equal",
    "E.peak_off": "peak {percent}",
    "E.disagrees": "differs",
    "E.held_equal": (
        "Parameters, gradients, AdamW's states and what the forward pass saves are predicted to the byte ({count} "
        "figures), the peaks within {percent}."
    ),
    "E.held_differs": (
        "Of {count} figures that should agree to the byte {wrong} differ; the peaks are within {percent}."
    ),
    "E.states": (
        "Of what one process keeps of parameters, gradients and AdamW's states, a rank keeps {data} under data "
        "parallelism, {tensor} under tensor parallelism, {pipeline} in the pipeline. Data parallelism copies and does "
        "not divide them (ZeRO does, part C)."
    ),
    "E.whole_gradient": (
        "(Under tensor parallelism gradients are larger than parameters: PyTorch makes the embedding's gradient for "
        "the whole vocabulary, and a rank's share stays a view of it.)"
    ),
    "E.same": (
        "And all three train the same model: over {steps} steps the losses are within {loss} of one process's, and "
        "the first step's gradients within {gradient}."
    ),
    "E.not_same": (
        "But they did not train the same model: over {steps} steps losses were up to {loss} from one process's, the "
        "first step's gradients up to {gradient}."
    ),
    "E.bad_news": (
        "Not all of it is as predicted: {checks}. That is bad news, and this command ends with 1. `nanum verify` shows "
        "such a run by itself."
    ),
}
