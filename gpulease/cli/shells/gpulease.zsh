#compdef gpulease
# Completion of gpulease VERSION for zsh, printed by: gpulease completion zsh

# GRAMMAR

# What the daemon knows: each candidate, a tab, and what it is.
_gpulease_ask() {
    (( $+commands[$program] )) || [[ -x $program ]] || program=gpulease
    local -a found
    found=("${(@f)$($program __complete "$@" "$PREFIX" "$socket" 2>/dev/null)}")
    found=("${(@)found/$'\t'/:}")
    [[ -n $found[1] ]] && _describe -V -t "$1" "$1" found
}

_gpulease_jobs() { _gpulease_ask jobs $1 }

_gpulease_gpus() { _gpulease_ask gpus }

_gpulease_command() {
    local -a alternatives
    alternatives=('files:file:_files')
    [[ -n $PREFIX && $PREFIX != */* ]] && alternatives+=('commands:command:_command_names -e')
    _alternative $alternatives
}

_gpulease_socket() {
    local place=${words[(i)--socket*]}
    socket=${words[place]#--socket=}
    [[ $socket == --socket ]] && socket=${words[place + 1]}
}

_gpulease() {
    local curcontext=$curcontext state socket program=${~words[1]} ret=1
    local -a line specs verbs
    typeset -A opt_args
    _gpulease_socket
    _gpulease_grammar ''
    _arguments -C $specs '(-)1: :->verb' '(-)*:: :->rest' && ret=0
    case $state in
    verb) _describe -t verbs verb verbs && ret=0 ;;
    rest)
        curcontext=${curcontext%:*:*}:gpulease-$words[1]:
        specs=()
        _gpulease_grammar "$words[1]"
        (( $#specs )) && _arguments -S $specs && ret=0
        ;;
    esac
    return ret
}

# Read at the first Tab by a function of this name, or at the shell's start.
if [[ -n ${funcstack[(r)_gpulease]} ]]; then
    _gpulease "$@"
elif (( $+functions[compdef] )); then
    compdef _gpulease gpulease
fi
