// The judge reads the histories of storms, one operation in a line of JSON, and lets porcupine
// decide whether each lock is linearizable: whether its operations, each at one moment between its
// call and its return, are a history of a lock that one client has at a time, or several readers,
// or a number of permits, with a larger fencing token for each hold than for the one before.
//
// go run . FILE...
package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os"
	"sort"
	"time"

	"github.com/anishathalye/porcupine"
)

// The permits of a key in a storm.
const permits = 2

// The time in which porcupine decides about one lock.
const patience = 10 * time.Minute

type operation struct {
	Key      string  `json:"key"`
	Hold     int     `json:"hold"`
	Mode     string  `json:"mode"`
	Fence    *uint64 `json:"fence"`
	Call     int64   `json:"call"`
	Returned int64   `json:"returned"`
}

// The two locks of a key are independent.
type lock struct {
	key     string
	permits bool
}

// A lock, with the numbers of its holds. As the tokens of all holds are larger than those before,
// the next hold is the one with the next token of the history: rank.
type state struct {
	rank    int
	holders string
	writer  bool
}

type input struct {
	operation
	rank int
}

var model = porcupine.Model{
	Init: func() any { return state{} },
	Step: func(before, in, _ any) (bool, any) {
		now, op := before.(state), in.(input)
		holders := parse(now.holders)
		if op.Fence == nil {
			place := sort.SearchInts(holders, op.Hold)
			if place == len(holders) || holders[place] != op.Hold {
				return false, before
			}
			holders = append(holders[:place], holders[place+1:]...)
			return true, state{now.rank, text(holders), now.writer && len(holders) > 0}
		}
		var isFree bool
		switch op.Mode {
		case "Exclusive":
			isFree = len(holders) == 0
		case "Permit":
			isFree = len(holders) < permits
		default:
			isFree = !now.writer
		}
		if !isFree || op.rank != now.rank+1 {
			return false, before
		}
		holders = append(holders, op.Hold)
		sort.Ints(holders)
		return true, state{op.rank, text(holders), op.Mode == "Exclusive"}
	},
	DescribeOperation: func(in, _ any) string { return fmt.Sprintf("%+v", in) },
}

// A state has to be comparable.
func text(holders []int) string {
	bytes, err := json.Marshal(holders)
	must(err)
	return string(bytes)
}

func parse(text string) (holders []int) {
	if text != "" {
		must(json.Unmarshal([]byte(text), &holders))
	}
	return holders
}

func must(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(2)
	}
}

func read(path string) map[lock][]operation {
	file, err := os.Open(path)
	must(err)
	defer file.Close()
	locks := map[lock][]operation{}
	lines := bufio.NewScanner(file)
	for lines.Scan() {
		var op operation
		must(json.Unmarshal(lines.Bytes(), &op))
		of := lock{op.Key, op.Mode == "Permit"}
		locks[of] = append(locks[of], op)
	}
	must(lines.Err())
	return locks
}

// Two holds have the same token, or a token is missing.
func ranks(ops []operation) (map[uint64]int, bool) {
	var tokens []uint64
	for _, op := range ops {
		if op.Fence != nil {
			tokens = append(tokens, *op.Fence)
		}
	}
	sort.Slice(tokens, func(one, other int) bool { return tokens[one] < tokens[other] })
	ranks := map[uint64]int{}
	for rank, token := range tokens {
		ranks[token] = rank + 1
	}
	return ranks, len(ranks) == len(tokens)
}

func main() {
	all, wrong := 0, 0
	for _, path := range os.Args[1:] {
		for of, ops := range read(path) {
			ranks, unique := ranks(ops)
			var history []porcupine.Operation
			for _, op := range ops {
				rank := 0
				if op.Fence != nil {
					rank = ranks[*op.Fence]
				}
				history = append(history, porcupine.Operation{
					ClientId: op.Hold, Input: input{op, rank}, Call: op.Call, Return: op.Returned,
				})
			}
			verdict := porcupine.Illegal
			if unique {
				verdict = porcupine.CheckOperationsTimeout(model, history, patience)
			}
			all += len(ops)
			if verdict != porcupine.Ok {
				wrong++
			}
			fmt.Printf("%s: %s (permits: %t): %d operations: %s\n", path, of.key, of.permits, len(ops), verdict)
		}
	}
	fmt.Printf("%d operations judged, %d locks are not linearizable\n", all, wrong)
	if all == 0 || wrong > 0 {
		os.Exit(1)
	}
}
