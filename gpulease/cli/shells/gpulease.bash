# Completion of gpulease VERSION for bash, printed by: gpulease completion bash

# GRAMMAR

# What the daemon knows: each candidate, a tab, and what it is.
_gpulease_ask() {
    local program=${COMP_WORDS[0]/#\~/$HOME}
    command -v -- "$program" >/dev/null || program=gpulease
    "$program" __complete "$@" "$value" "$socket" 2>/dev/null
}

# Where bash only lists, it lists what they are as well; what it inserts is the candidate.
_gpulease_offer() {
    local line
    while IFS= read -r line; do
        COMPREPLY+=("$line")
    done
    case $COMP_TYPE in
    33 | 63 | 64) ((${#COMPREPLY[@]} > 1)) && { COMPREPLY=("${COMPREPLY[@]/$'\t'/  (}"); COMPREPLY=("${COMPREPLY[@]/%/)}"); return; } ;;
    esac
    COMPREPLY=("${COMPREPLY[@]%%$'\t'*}")
}

_gpulease_files() {
    local IFS=$'\n'
    compopt -o filenames 2>/dev/null
    COMPREPLY+=($(compgen "$1" -- "$value"))
}

# Offer what may stand for $value, which is of the kind $1.
_gpulease_kind() {
    local IFS=$' \t\n'
    case $1 in
    jobs*) _gpulease_offer < <(_gpulease_ask jobs "$verb") ;;
    gpus*) _gpulease_offer < <(_gpulease_ask gpus) ;;
    choice:*) COMPREPLY=($(compgen -W "${1#choice:}" -- "$value")) ;;
    user*) COMPREPLY=($(compgen -u -- "$value")) ;;
    folder*) _gpulease_files -d ;;
    file*) _gpulease_files -f ;;
    command*)
        _gpulease_files -f
        [[ $value && $value != */* ]] && COMPREPLY+=($(compgen -c -- "$value"))
        ;;
    esac
}

# What follows the command of `run` is a line of that command's own, from COMP_WORDS[$1] on.
_gpulease_delegate() {
    if declare -F _comp_command_offset >/dev/null; then
        _comp_command_offset "$1"
    elif declare -F _command_offset >/dev/null; then
        _command_offset "$1"
    else
        compopt -o bashdefault -o default 2>/dev/null
    fi
}

# bash takes --mem=4G apart at the "="; put the words together again, and note where each begins.
_gpulease_words() {
    local i word
    words=() starts=()
    for ((i = 0; i <= COMP_CWORD; i++)); do
        word=${COMP_WORDS[i]}
        if ((i > 1)) && [[ ${words[-1]} == --* && ( $word == = || ${words[-1]} == --*= ) ]]; then
            words[-1]+=$word
        else
            words+=("$word")
            starts+=("$i")
        fi
    done
}

_gpulease() {
    COMPREPLY=()
    local words starts options arguments kind verb= socket= value= given=0 bare= word i
    _gpulease_words
    local last=$((${#words[@]} - 1))
    for ((i = 1; i < last; i++)); do
        word=${words[i]}
        if [[ $word == -- ]]; then
            bare=1
        elif [[ $word == -* && ! $bare ]]; then
            _gpulease_value "$verb" "${word%%=*}"
            [[ ${word%%=*} == --socket ]] && { [[ $word == *=* ]] && socket=${word#*=} || socket=${words[i + 1]}; }
            [[ $kind && $word != *=* ]] && ((++i == last)) && break
            kind=
        elif [[ ! $verb ]]; then
            verb=$word
        else
            _gpulease_grammar "$verb"
            if [[ ${arguments[given]} == command* ]]; then
                _gpulease_delegate "${starts[i]}"
                return
            fi
            [[ ${arguments[given]} == *... ]] || ((given++))
        fi
    done
    value=${words[last]}
    if [[ $kind ]]; then
        _gpulease_kind "$kind"
        return
    fi
    _gpulease_grammar "$verb"
    if [[ $value == --*=* && ! $bare ]]; then
        local option=${value%%=*}
        value=${value#*=}
        _gpulease_value "$verb" "$option"
        _gpulease_kind "$kind"
        [[ $COMP_WORDBREAKS == *=* ]] || COMPREPLY=("${COMPREPLY[@]/#/$option=}")
    elif [[ $value == -* && ! $bare ]]; then
        COMPREPLY=($(compgen -W "$options" -- "$value"))
    elif [[ ! $verb ]]; then
        _gpulease_kind "$_gpulease_verbs"
    else
        _gpulease_kind "${arguments[given]}"
    fi
}

complete -F _gpulease gpulease
