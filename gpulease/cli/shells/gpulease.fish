# Completion of gpulease for fish, printed by: gpulease completion fish

function __gpulease_complete
    set -l words (commandline -opc)
    set -l typed (commandline -ct)
    set -l program (string replace -r '^~' $HOME -- $words[1])
    type -q -- $program; or set program gpulease
    set -l lines ($program __complete $words[2..-1] "$typed" 2>/dev/null)
    set -l action (string split ' ' -- "$lines[1]")
    switch "$action[1]"
        case words
            printf '%s\n' $lines[2..-1]
        case files
            __fish_complete_path $typed
        case folders
            __fish_complete_directories $typed
        case program
            __fish_complete_path $typed
            test -n "$typed"; and complete -C $typed
        case command
            set -l command $words[(math $action[2] + 1)..-1]
            complete -C (string join ' ' -- (string escape -- $command) $typed)
    end
end

complete -c gpulease -f -a '(__gpulease_complete)'
