"""A federation over Flower: a server, and nodes that keep their rows.

    described   what everyone knows of everyone's data, and the experiment made of it
    agreement   how that is agreed on: columns, categories, classes, scaling, by messages
    words       of a secure run: categories and classes, by sums that do not say whose they are
    node        what a client does: it answers questions
    run_at_node a run as a node has it: its rows and its states on disk
    sources     where a node's rows come from
    vertical    data split by features: what a party does with its columns, its labels and its keys
    joined      files of such parties, joined by ids that nobody shows
    resident    the node's process, which outlives Flower's one process a message
    warm        how Flower's process for a message starts in a moment
    client      the ClientApp: hands messages to the resident
    serverapp   the ServerApp: waits for the nodes, and hands them over
    server      agrees with them, runs the experiment
    links       how the engine's questions reach nodes: by Flower's grid, or in one process
    masked      sums that the server learns without the summands, over a link
    coding      what numbers become for that
    local       a federation on this machine, with certificates and keys made on the spot
    operators   the files with which people start one on several machines

Nothing here is known to algorithms or to the round loop; the engines are `engines.flower` and, for columns,
`engines.parties`.
"""
