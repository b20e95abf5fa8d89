#compdef gpulease
# Completion of gpulease for zsh, printed by: gpulease completion zsh

_gpulease() {
    local program=${~words[1]} action line
    local -a lines candidates
    (( $+commands[$program] )) || [[ -x $program ]] || program=gpulease
    lines=("${(@f)$($program __complete "${(@Q)words[2,CURRENT-1]}" "${(Q)PREFIX}" 2>/dev/null)}")
    action=$lines[1]
    case $action in
    words)
        for line in $lines[2,-1]; do
            candidates+=("${${line%%$'\t'*}//:/\\:}${${line#${line%%$'\t'*}}/$'\t'/:}")
        done
        _describe -V gpulease candidates
        ;;
    files) compset -P '--*='; _files ;;
    folders) compset -P '--*='; _files -/ ;;
    program)
        local -a alternatives=('files:file:_files')
        [[ -n $PREFIX && $PREFIX != */* ]] && alternatives+=('commands:command:_command_names -e')
        _alternative $alternatives
        ;;
    command*)
        shift ${action#* } words
        (( CURRENT -= ${action#* } ))
        _normal
        ;;
    esac
}

# Read at the first Tab by a function of this name, or at the start of the shell.
if [[ -n ${funcstack[(r)_gpulease]} ]]; then
    _gpulease "$@"
elif (( $+functions[compdef] )); then
    compdef _gpulease gpulease
fi
