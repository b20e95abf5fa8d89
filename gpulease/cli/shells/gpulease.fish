# Completion of gpulease VERSION for fish, printed by: gpulease completion fish

# Read the words before the cursor: the verb, how many arguments it has been given, the socket that
# was named, and what follows the command of `run`.
function __gpulease_parse
    set -g __gpulease_verb ''
    set -g __gpulease_given 0
    set -g __gpulease_socket ''
    set -g __gpulease_rest
    set -l bare 0
    set -l words (commandline -opc)[2..-1]
    while set -q words[1]
        set -l word $words[1]
        if test $bare = 0; and test "$word" = --
            set bare 1
        else if test $bare = 0; and string match -q -- '-*' $word
            set -l parts (string split -m 1 = -- $word)
            if contains -- "$__gpulease_verb $parts[1]" $__gpulease_with_value; and not set -q parts[2]
                set -e words[1]
                set parts $parts $words[1]
            end
            if test "$parts[1]" = --socket
                set -g __gpulease_socket $parts[2]
            end
        else if test -z "$__gpulease_verb"
            set -g __gpulease_verb $word
        else if contains -- $__gpulease_verb $__gpulease_with_command
            set -g __gpulease_rest $words
            return
        else
            set -g __gpulease_given (math $__gpulease_given + 1)
        end
        set -e words[1]
    end
end

# Whether a word or an option of verb $argv[1] is next; if $argv[2] is given, its argument of that
# number, or with a + of that number and any after it.
function __gpulease_at
    __gpulease_parse
    test "$__gpulease_verb" = "$argv[1]"; and not set -q __gpulease_rest[1]; or return 1
    set -q argv[2]; or return 0
    set -l next (math $__gpulease_given + 1)
    set -l number (string replace + '' -- $argv[2])
    test $next = $number; or string match -q '*+' -- $argv[2]; and test $next -ge $number
end

function __gpulease_command_is_next
    __gpulease_parse
    contains -- "$__gpulease_verb" $__gpulease_with_command; and not set -q __gpulease_rest[1]
end

function __gpulease_commands
    set -l typed (commandline -ct)
    test -n "$typed"; and not string match -q -- '-*' $typed; and complete -C $typed
end

function __gpulease_inside
    __gpulease_parse
    set -q __gpulease_rest[1]
end

function __gpulease_delegate
    complete -C (string join ' ' -- (string escape -- $__gpulease_rest) (commandline -ct))
end

# What the daemon knows: each candidate, a tab, and what it is.
function __gpulease_ask
    set -l program (string replace -r '^~' $HOME -- (commandline -opc)[1])
    type -q -- $program; or set program gpulease
    $program __complete $argv (commandline -ct) "$__gpulease_socket" 2>/dev/null
end

# GRAMMAR

complete -c gpulease -f
complete -c gpulease -n __gpulease_command_is_next -F -a '(__gpulease_commands)'
complete -c gpulease -n __gpulease_inside -f -a '(__gpulease_delegate)'
