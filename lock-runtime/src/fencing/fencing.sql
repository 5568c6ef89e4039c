-- Fencing tokens for PostgreSQL 10 and later. A transaction calls lock_runtime.fenced first, with
-- the token of its lock:
--
--     begin;
--     select lock_runtime.fenced('account:7', 1795456170925944);
--     update account set balance = balance - 10 where id = 7;
--     commit;
--
-- It is refused with SQLSTATE LK001 if a transaction with a larger token has been committed for the
-- same resource. Execute this file once per database, as the role that will own the schema. It is
-- one statement, so it takes effect as a whole, and several processes may execute it at the same
-- time or again. Other roles need:
--
--     grant usage on schema lock_runtime to my_service;
do $install$
begin
    -- `if not exists` does not wait for another transaction that creates the same object, and fails
    -- when that one commits. The number is "lock_run" in ASCII.
    perform pg_advisory_xact_lock(7813573191325087086);

    -- A role that may not create schemas can then execute this in a schema that it owns.
    if to_regnamespace('lock_runtime') is null then
        create schema lock_runtime;
    end if;

    -- Half of each page is left free, so that an update needs no new entry in the index.
    create table if not exists lock_runtime.seen (
        resource text collate "C" primary key,
        fence bigint not null
    ) with (fillfactor = 50);

    -- With the rights of its owner: callers need none on the table, and so cannot lower a token.
    create or replace function lock_runtime.fenced(resource text, fence bigint) returns void
    language plpgsql volatile parallel unsafe security definer
    set search_path = pg_catalog, pg_temp
    as $fenced$
    #variable_conflict use_column
    declare
        largest bigint;
    begin
        -- Not `strict`: a call with a null would do nothing and be taken for a success.
        if fenced.resource is null or fenced.fence is null then
            raise exception using
                errcode = 'null_value_not_allowed',
                message = 'lock_runtime.fenced: the resource and the fencing token must not be null';
        end if;
        if fenced.resource = '' then
            raise exception using
                errcode = 'invalid_parameter_value',
                message = 'lock_runtime.fenced: the name of the resource is empty';
        end if;
        if fenced.fence <= 0 then
            raise exception using
                errcode = 'invalid_parameter_value',
                message = format('lock_runtime.fenced: %s is not a fencing token', fenced.fence),
                hint = 'A fencing token is a number from 1 to 9223372036854775807.';
        end if;

        -- Waits until another transaction on the same resource has ended, and then compares with
        -- its token. In `repeatable read` and `serializable` it fails with 40001 instead, as all
        -- updates do there.
        insert into lock_runtime.seen values (fenced.resource, fenced.fence)
            on conflict (resource) do update set fence = excluded.fence
            where seen.fence <= excluded.fence;
        if found then
            return;
        end if;

        select seen.fence into largest from lock_runtime.seen where seen.resource = fenced.resource;
        -- A class of its own: frameworks repeat a transaction that fails with class 40, and this
        -- one never succeeds.
        raise exception using
            errcode = 'LK001',
            message = format('the fencing token %s is stale: %s has seen %s',
                fenced.fence, fenced.resource, largest),
            detail = 'The lock was lost, and a later holder has written.',
            hint = 'Do not repeat the transaction, and write nothing more under this lock.',
            schema = 'lock_runtime',
            table = 'seen';
    end
    $fenced$;
end
$install$;
