# Completion of gpulease for bash, printed by: gpulease completion bash

_gpulease() {
    local IFS=$'\n' program=${COMP_WORDS[0]/#\~/$HOME} typed=${COMP_WORDS[COMP_CWORD]#=} action line
    command -v -- "$program" >/dev/null || program=gpulease
    COMPREPLY=()
    {
        read -r action
        while read -r line; do COMPREPLY+=("$line"); done
    } < <("$program" __complete "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null)
    case $action in
    words)
        # Where bash only lists the candidates, it lists their descriptions as well.
        if [[ $COMP_TYPE == @(33|63|64) ]] && ((${#COMPREPLY[@]} > 1)); then
            COMPREPLY=("${COMPREPLY[@]/%/)}")
            COMPREPLY=("${COMPREPLY[@]/$'\t'/  (}")
        else
            COMPREPLY=("${COMPREPLY[@]%%$'\t'*}")
        fi
        ;;
    files | program)
        compopt -o filenames 2>/dev/null
        COMPREPLY=($(compgen -f -- "$typed"))
        [[ $action == program && $typed && $typed != */* ]] && COMPREPLY+=($(compgen -c -- "$typed"))
        ;;
    folders)
        compopt -o filenames 2>/dev/null
        COMPREPLY=($(compgen -d -- "$typed"))
        ;;
    command*)
        IFS=$' \t\n'
        if declare -F _comp_command_offset >/dev/null; then
            _comp_command_offset "${action#* }"
        elif declare -F _command_offset >/dev/null; then
            _command_offset "${action#* }"
        else
            compopt -o bashdefault -o default 2>/dev/null
        fi
        ;;
    esac
}

complete -F _gpulease gpulease
