//! A simulator of clients as they are: `LockClient`, its guards and futures, its driver. Their
//! tasks run on a Tokio runtime of one thread with a paused clock, which polls them in a fixed
//! order, before a store whose calls and messages are delayed and lost. All random numbers come
//! from one seed, so a seed repeats its schedule.
//!
//! The runtimes of turmoil and madsim bring networks, which the store replaces here; madsim also
//! needs another Tokio and a `cfg` of the whole build. shuttle and loom explore the orders of
//! threads at each atomic operation, but replace Tokio's timers and tasks, of which a schedule has
//! thousands.
//!
//! Not repeated, or not covered: fencing tokens begin with the date, and the history counts them
//! from the first one. The runtimes of a client that has several are visited in the order of a hash
//! map; two paused clocks do not agree, so the end of a runtime is simulated by the end of the
//! driver's task alone. The keeper is a thread, and stays out, as do summaries of log lines.
//! Threads do not race.

mod task;
mod wire;
mod world;

use std::{sync::Arc, time::Duration};

use tokio::{
    runtime::{Builder, Handle},
    task::JoinHandle,
    time::sleep,
};

use self::{
    task::Task,
    wire::Wire,
    world::{KEYS, Violation, World, Wrong, schedules},
};
use super::{dice::Dice, explore::from_environment};
use crate::{
    LockClient,
    shell::simulated::{Planted, Simulation, drivers},
};

/// The number of schedules in which a planted fault is found.
const FOUND_WITHIN: u64 = 10_000;
/// The number of schedules of a test.
const SCHEDULES: u64 = 200;
/// The pause between two looks at the invariants.
const LOOK: Duration = Duration::from_millis(50);
/// The time after which all tasks have ended.
const LONGEST: Duration = Duration::from_secs(600);
/// The time for leases, queue entries and calls to end.
const SETTLED: Duration = Duration::from_secs(20);

/// Runs one schedule. Returns the violation, and the history if it `is_recorded`.
fn run(
    seed: u64,
    planted: Option<Planted>,
    only: Option<Wrong>,
    is_recorded: bool,
) -> (Option<Violation>, Vec<String>) {
    let _simulation = Simulation::new(seed, planted);
    let runtime = Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .expect("a runtime");
    let world = runtime.block_on(schedule(seed, only, is_recorded));
    drop(runtime);
    world.end()
}

async fn schedule(seed: u64, only: Option<Wrong>, is_recorded: bool) -> Arc<World> {
    let mut dice = Dice::new(seed);
    let faults = dice.one_of(&[0, 0, 10, 40]);
    let until = dice.up_to(Duration::from_secs(20));
    let world = World::new((until, faults), is_recorded, only);
    let (keys, shuts_down) = (1 + dice.below(KEYS.len()), dice.chance(300));
    let kills = dice.one_of(&[0, 0, 20, 200]);
    let mut tasks = Vec::new();
    let mut wires = Vec::new();
    for number in 0..2 + dice.below(3) {
        let wire = Wire::new(&world, number, dice.fork());
        let client = LockClient::builder().identity(format!("client {number}"));
        let client = client.build_with_store(wire.clone()).expect("a client");
        world.joins(client.core.id);
        for _ in 0..1 + dice.below(4) {
            let task = Task {
                world: world.clone(),
                client: client.clone(),
                number,
                dice: dice.fork(),
                keys,
                shuts_down,
            };
            tasks.push(tokio::spawn(task.run()));
        }
        if faults > 0 && dice.chance(400) {
            tasks.push(tokio::spawn(outage(wire.clone(), dice.fork())));
        }
        wires.push(Arc::downgrade(&wire));
    }
    let mut waited = Duration::ZERO;
    while tasks.iter().any(|task| !task.is_finished()) && waited < LONGEST && !world.has_found() {
        sleep(LOOK).await;
        waited += LOOK;
        world.look();
        if dice.chance(kills)
            && let running = drivers()
            && !running.is_empty()
        {
            world.driver_ends();
            running[dice.below(running.len())].abort();
        }
    }
    settle(&world, tasks).await;
    if !world.has_found() {
        let left = Handle::current().metrics().num_alive_tasks();
        let clients = wires.iter().filter(|wire| wire.strong_count() > 0).count();
        if left + clients > 0 {
            let what = || format!("{left} tasks and {clients} clients are left");
            world.report(Wrong::Leak, what);
        }
    }
    world
}

/// Breaks a connection for a while.
async fn outage(wire: Arc<Wire>, mut dice: Dice) {
    sleep(dice.up_to(Duration::from_secs(10))).await;
    wire.set_down(true);
    sleep(dice.up_to(Duration::from_secs(4))).await;
    wire.set_down(false);
}

/// Waits until nothing should be left.
async fn settle(world: &World, tasks: Vec<JoinHandle<()>>) {
    if !world.has_found() && tasks.iter().any(|task| !task.is_finished()) {
        world.report(Wrong::Late, || "a task has not ended".into());
    }
    for task in tasks {
        if task.is_finished() && task.await.is_err_and(|error| error.is_panic()) {
            world.report(Wrong::Panic, || "a task has panicked".into());
        }
    }
    let mut waited = Duration::ZERO;
    while waited < SETTLED && !world.has_found() {
        sleep(LOOK * 4).await;
        waited += LOOK * 4;
        world.look();
    }
    world.is_empty();
}

/// Prints the history of a schedule, and panics if it violates an invariant.
fn show(seed: u64) {
    let (found, history) = run(seed, None, None, true);
    let history = history.join("\n");
    match found {
        None => println!("seed {seed}\n{history}"),
        Some(violation) => {
            panic!("seed {seed}\n{history}\n{violation}\nLOCK_EXPLORER_SEED={seed} reproduces it")
        }
    }
}

#[test]
fn no_schedule_of_clients_breaks_a_promise() {
    if let Some(seed) = from_environment("LOCK_EXPLORER_SEED") {
        return show(seed);
    }
    let begin = std::time::Instant::now();
    let schedules = schedules(SCHEDULES);
    for seed in 0..schedules {
        if run(seed, None, None, false).0.is_some() {
            show(seed);
        }
    }
    println!("{schedules} schedules in {:?}", begin.elapsed());
}

#[test]
fn a_seed_repeats_its_schedule() {
    for seed in 0..100 {
        let history = run(seed, None, None, true).1;
        assert!(!history.is_empty());
        let again = std::thread::spawn(move || run(seed, None, None, true).1);
        let again = again.join().expect("the same schedule");
        for (line, same) in history.iter().zip(&again) {
            assert_eq!(line, same, "seed {seed}");
        }
        assert_eq!(history.len(), again.len(), "seed {seed}");
    }
}

/// Tests that a fault that is planted in a shell is found by its violation.
macro_rules! found {
    ($($name:ident: $planted:ident => $wrong:ident,)*) => {
        $(
            #[test]
            fn $name() {
                is_found(Planted::$planted, Wrong::$wrong);
            }
        )*
    };
}

fn is_found(planted: Planted, wrong: Wrong) {
    let fails = |seed, planted| run(seed, planted, Some(wrong), false).0.is_some();
    // A schedule that fails by itself says nothing about the fault.
    let violates = |seed: &u64| fails(*seed, Some(planted)) && !fails(*seed, None);
    let Some(seed) = (0..FOUND_WITHIN).find(violates) else {
        panic!("{planted:?}: nothing found in {FOUND_WITHIN} schedules")
    };
    if let (Some(violation), history) = run(seed, Some(planted), Some(wrong), true) {
        let history = history.join("\n");
        println!("{planted:?} with seed {seed}: {violation}\n{history}");
    }
}

found! {
    found_waiter_that_is_not_woken: LosesWakeUp => Stuck,
    found_waiter_with_the_waker_of_another_task: KeepsFirstWaker => Stuck,
    found_request_that_stays_without_its_future: CancelsNothing => Left,
    found_request_that_is_dropped_after_it_was_woken: CancelsNoneThatIsWoken => Left,
    found_lock_without_a_view: ForgetsView => Loss,
    found_end_of_another_view: EndsWrongView => Loss,
    found_loss_that_is_not_told: TellsNoLoss => Untold,
    found_guard_that_stays_when_it_is_dropped: KeepsDroppedGuard => Left,
    found_driver_that_sleeps_through_its_work: RousesNobody => Left,
    found_dead_driver_that_counts_as_running: CountsAsRunning => Left,
    found_calls_that_die_with_their_driver: ForgetsCallsInFlight => Loss,
    found_batch_that_stays_in_flight: CountsAnsweredBatch => Loss,
    found_driver_that_outlives_its_client: StaysWithoutClient => Leak,
    found_shutdown_that_is_not_told: TellsNoEnd => Shutdown,
}
