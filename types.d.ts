// Types that several modules share; `tsc --checkJs` reads them (make lint), no page does.
export type Range = [number, number];
export interface Tick { value: number; label: string }
export interface AxisData {
  format?: string; pad?: number; log?: boolean; ticks?: Tick[]; clips?: boolean; label?: string; includes?: number[];
  whole?: boolean; // only integers have ticks
}
export interface Look { colour: string; marker: string; dash: string; width: number }

/** Series of a chart as figures/shapes.py's plot_data writes it; `exact` values are never smoothed. */
export interface SeriesInput {
  name?: string; x?: number[]; y?: (number | null)[]; look?: Partial<Look>;
  band?: { low: (number | null)[]; high: (number | null)[] };
  labels?: string[]; level?: number | null; background?: boolean; bars?: boolean; exact?: boolean;
}
export interface SeriesData extends SeriesInput { x: number[]; y: any[]; look: Look; ascends: boolean }

/** Mark at a value of the horizontal axis; a `small` one is short and has no name. */
export interface Mark { x: number; text: string; name?: string; small?: boolean }

export interface PlotData {
  title?: string; size?: { width: number; height: number }; x: AxisData; y: AxisData; series: SeriesInput[];
  marks?: Mark[]; smooth?: number; zoom?: Range | null; hidden?: Iterable<string>; controls?: boolean;
}

/** Parts of a chart that are needed to draw it. */
export interface ChartState {
  data: PlotData; series: SeriesData[]; range: Range | null; hidden: Set<string | undefined>;
  valuesOf: (series: SeriesData) => any[];
}
export interface Frame {
  xRange: Range; yRange: Range; width: number; height: number; shown: SeriesData[]; front: SeriesData[];
  titles: string[]; top: number; left: number; right: number; bottom: number; rows: Tick[]; columns: Tick[];
  tilted: boolean; above: boolean; labels: { left: number; y: number; width: number }[];
  xOf: (value: number) => number; yOf: (value: number) => number;
}

/** What a view shows at first, and what it calls when the reader selects something else. */
declare global {
  interface AnatomyOptions { shown?: { part?: string }; changed?: (state: { part: string }) => void }
  interface ExpertsOptions { layer?: any; place?: any; changed?: (state: any) => void }
  interface GraphOptions { shown?: { open?: string, at?: string, shapes?: string, backward?: string };
    changed?: (state: any) => void }
  interface LensOptions { show?: string; row?: any; column?: any; changed?: (state: any) => void }
  interface PatchOptions { site?: any; row?: any; column?: any; changed?: (state: any) => void }
  interface SaliencyOptions { measure?: string; explain?: ((position: number) => void) | null;
    changed?: (state: any) => void; heading?: any }
  interface SearchOptions { step?: any; play?: boolean; changed?: (state: { step: number | undefined }) => void }
  interface SurpriseOptions { unit?: string; place?: any; changed?: (state: any) => void;
    point?: (place: number) => void; all?: any[] }
}
